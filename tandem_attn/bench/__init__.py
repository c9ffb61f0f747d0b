"""Speed of attention beside its peers: one protocol, its cases, and its reports. ``tandem bench`` is its command."""
