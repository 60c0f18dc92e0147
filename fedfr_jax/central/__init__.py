"""Central training: one model on the whole mesh, with classes sharded if asked.

settings        settings, their optimizer, schedule, sharding and checks
epochs          compiled epochs of a trainer; batches: their examples, step: one step
sharding        which leaves are sharded over the devices, and how gradients are summed
class_parallel  margin softmax over sharded classes, sampled or all
optimizers      SGD, Adam and LARS by name
"""
