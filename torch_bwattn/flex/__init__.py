"""FlexAttention's interface on this package's operators. Importing it imports ``torch.nn.attention.flex_attention``."""
