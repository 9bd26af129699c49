"""The entry points: command line, settings, supervisor.

The only package that prints or reads the environment.
"""
