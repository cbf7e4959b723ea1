"""trjax: a data-parallel trainer for convolutional networks that knows what its step compiles to."""
