"""nn.Module on tiered blocks: which parameters form a block, and when they are in HBM."""
