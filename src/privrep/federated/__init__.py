"""Users on machines of their own: a server that learns from them, nodes that hold them, and what both agree on."""
