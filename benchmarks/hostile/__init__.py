"""Nodes whose engines falsify their work. They load nothing of the studies that attack hubs with them."""
