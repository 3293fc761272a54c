"""A ``Profile`` as text, Markdown, HTML, one line, and scalars: renderers that only format."""
