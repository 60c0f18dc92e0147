"""The floor: FedAvg as a hand-written PyTorch loop, clients one after another."""

import torch
import workloads
from torch_models import accuracy, network, tensors, train


def main():
    args = workloads.arguments(__doc__)
    torch.set_num_threads(args.threads)
    work = workloads.WORKLOADS[args.workload]
    data = workloads.make_data(work)
    images, labels = tensors(data.images, data.labels)
    model = network(work)
    server = {name: x.clone() for name, x in model.state_dict().items()}
    clock = workloads.Clock()
    for round in range(1 + args.rounds):
        with clock:
            total = {name: torch.zeros_like(x) for name, x in server.items()}
            for client in workloads.cohort(work, round):
                model.load_state_dict(server)
                train(model, images[client], labels[client], work)
                for name, x in model.state_dict().items():
                    total[name].add_(x, alpha=1 / work.cohort)
            server = total
    model.load_state_dict(server)
    test = tensors(data.test_images, data.test_labels)
    workloads.report(torch.__version__, clock, accuracy=accuracy(model, *test))


if __name__ == "__main__":
    main()
