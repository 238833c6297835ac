"""Any network as layers: traced to a flat list of operators, cut where the slowest part is fastest."""
