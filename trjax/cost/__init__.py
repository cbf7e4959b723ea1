"""Seconds from bytes, FLOPs and links. It may use nothing else of trjax."""
