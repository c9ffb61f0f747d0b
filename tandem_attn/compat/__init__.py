"""Other libraries' attention calls on Tandem: ``flash_attn``, ``sdpa``, ``transformers``.

Each is imported by itself; none loads the library it replaces.
"""
