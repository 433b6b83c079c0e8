"""Memory and streams that aiocuda shares with other libraries. See `README.md` in this directory."""
