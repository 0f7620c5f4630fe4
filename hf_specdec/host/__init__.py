"""Everything that knows transformers' insides, one file per subject."""
