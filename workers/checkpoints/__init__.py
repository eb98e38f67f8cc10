"""Keys and values of prompt prefixes, kept on disk so that none is computed twice."""
