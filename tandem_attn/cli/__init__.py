"""The command ``tandem``: ``main.py`` gathers the subcommands, one small file each."""
