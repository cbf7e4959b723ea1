"""Models as chains of segments, and weights from and to other libraries. It may use the leaves."""
