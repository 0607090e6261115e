"""The version of this package, by itself: whoever writes it down need not import the whole package."""

__version__ = "0.6.0"
