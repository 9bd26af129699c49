"""The language that the processes share: messages, codec, channels, settings, errors.

Both the services and the orchestrator import this package, and it imports neither. It is the only
package that imports `zmq`.
"""
