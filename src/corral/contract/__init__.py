"""What Corral's processes say to each other.

Everyone may import this package; it imports only the standard library and the codec.
"""
