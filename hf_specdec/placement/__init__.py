"""Where target and draft go: numbers of bytes and bytes per second in, a plan out.

Knows nothing of torch or transformers; sizes come from `host.sizes`, layouts of layers from `host.placement`.
"""
