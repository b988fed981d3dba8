"""The command line, one file a command; what they share is imported once signals are heard, as it takes a second."""

from .entry_point import main as main
