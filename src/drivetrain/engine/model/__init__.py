"""The decoder: batches, layers, loss, initial weights, Hugging Face folders.

What lives here is the mathematics of one model on one device. What may not: process groups, sharding,
optimizers, the training loop, and anything that reads data or writes runs. One subject a file.

Tensor names carry their shape. The letters, in the order they appear:

====== ================================================================
letter dimension
====== ================================================================
B      sequences in the batch
S      tokens in a sequence (``model.seq_length`` in training)
T      tokens in the batch, B x S, documents one after the other
D      width of the residual stream (``model.hidden_size``)
H      query heads (``model.num_attention_heads``)
G      key/value heads, the query groups (``model.num_query_groups``)
K      width of a head (``model.kv_channels``)
F      width of the MLP (``model.ffn_hidden_size``)
V      vocabulary (``model.vocab_size``)
====== ================================================================

``q_THK`` is a tensor of shape (T, H, K); a scalar has no suffix.
"""

__all__: list[str] = []
