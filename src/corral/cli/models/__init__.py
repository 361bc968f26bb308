"""`corral models` and `corral chat`: models, their replicas, and requests to them."""
