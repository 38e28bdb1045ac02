"""How a model learns from each kind of data, between the losses and the stages that call them."""
