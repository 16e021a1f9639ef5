"""The routes, by the server whose clients call them."""
