"""Modifications of scores and masks, as FlexAttention has them: traced to data, evaluated, recognised."""
