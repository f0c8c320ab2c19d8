"""Vision-language models as judges."""
