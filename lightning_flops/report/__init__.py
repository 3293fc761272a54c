"""A ``Profile`` as text, Markdown and scalars: renderers that only format."""
