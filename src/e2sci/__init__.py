"""E²-SCI: edge-cloud speculative decoding. A small model at the edge and a large one in the cloud
write one text together.
"""

__version__ = "0.1.0"
