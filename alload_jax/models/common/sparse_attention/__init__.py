"""Self-attention that becomes sparse during training (DSV, arXiv 2502.07590), for any family.

Tokens are ordered in three-dimensional tiles. A profile measures, for each layer and head, how few
blocks of keys hold most of the attention; a selector says which blocks those are; and each layer
switches from dense attention to lists of blocks when both are good enough, by itself.
"""
