"""The mapping files that ckptmap ships."""
