"""Transport of messages: sockets, pipes, codec, keys."""
