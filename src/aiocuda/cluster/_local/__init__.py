"""The engine ``"local"``: processes of this machine, connected by socket pairs that they inherit."""
