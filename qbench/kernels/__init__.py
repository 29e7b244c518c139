"""Matrix products with weights in any format: `dispatch.linear` picks, `reference` is always there."""
