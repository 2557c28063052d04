"""Federations: users on machines of their own, a server that learns from them, and nodes that hold them."""

from privrep.federated.wire import silence_flower as silence_flower  # Flower reads it when it is imported: first
