"""`headsmith push` and `headsmith pull`: heads on the Hugging Face Hub, with a model card."""
