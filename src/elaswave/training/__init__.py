"""What is trained: model, data and optimizer, as a person brings them or as a configuration describes them."""
