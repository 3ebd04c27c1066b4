"""From conversations to packed rows of token ids and loss masks."""
