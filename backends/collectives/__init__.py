"""The collectives and point-to-point operations, as functions.

Names, signatures and semantics are those of ``torch.distributed``. What they
have in common:

- Arrays are numpy arrays or anything that exports DLPack (CPU torch tensors,
  cupy arrays), C-contiguous, and writable where they are written. The device
  type of the arrays picks the group's backend.
- `src` and `dst` are *global* ranks; `group_src` and `group_dst` are ranks in
  the group, instead.
- With ``async_op=True`` the function returns a :class:`Work` at once, and the
  arrays belong to the op until it is done. Else it blocks and returns
  ``None``.
- What is wrong with the arguments raises `TypeError` or `ValueError` before
  anything is sent; the group stays usable.
- What goes wrong afterwards raises `DistTimeoutError`, `DistAbortedError` or
  another `DistBackendError`, naming rank, op and sequence number.
- On a rank that is not in `group`, an op warns and does nothing; it returns ``None``,
  and a blocking receive -1.
"""
