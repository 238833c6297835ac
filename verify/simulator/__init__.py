"""The protocol on virtual time: the real control core and planning functions, a toy model, a network made of events,
faults at every instant, and checkers that know nothing of how it is done."""
