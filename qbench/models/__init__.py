"""Models as lazy mappings from tensor name to tensor, wherever they are and however they are stored."""
