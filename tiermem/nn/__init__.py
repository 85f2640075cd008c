"""``nn.Module`` on tiered blocks: which parameters form a block, and when it is in HBM."""
