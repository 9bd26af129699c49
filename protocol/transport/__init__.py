"""Messages on their way: sockets, pipes, bytes, keys."""
