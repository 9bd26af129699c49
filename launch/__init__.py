"""The door: command line, settings, supervisor.

The only room that prints or reads the environment.
"""
