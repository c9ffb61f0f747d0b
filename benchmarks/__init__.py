"""Speed measurements on a GPU: peers, one protocol, and the tables made with it."""
