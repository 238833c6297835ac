"""What tries elaswave out, beside it: nothing here is in the wheel, and `elaswave` imports nothing of it.

`simulator` runs the product's machines on virtual time, `planted_bugs` are what its search must find, `chaos` strikes
real jobs. ``python -m verify`` runs them, from a checkout.
"""
