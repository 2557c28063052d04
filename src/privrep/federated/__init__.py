"""Users on machines of their own: a server that learns from them, nodes that hold them, and what both agree on."""

from privrep.federated.wire import silence_flower as silence_flower  # Flower reads it when it is imported: first
