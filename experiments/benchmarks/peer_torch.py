"""The floor: FedAvg as a hand-written PyTorch loop, clients one after another."""

import torch
import workloads
from torch_models import accuracy, moving, network, tensors, train


def main():
    args = workloads.arguments(
        __doc__,
        device={"default": "cpu", "help": "cpu or cuda"},
        clients={"type": int, "default": 0, "help": "all in every round"},
    )
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as XLA does
    if args.clients:
        work = workloads.WORKLOADS[args.workload]
        work = workloads.everyone(work, args.clients)
        data = workloads.make_data(work)
    else:
        work, data = workloads.inputs(args)
    on_device = lambda *arrays: [x.to(args.device) for x in tensors(*arrays)]
    images, labels = on_device(data.images, data.labels)
    model = network(work).to(args.device)
    server = {name: x.clone() for name, x in moving(model).items()}
    test = on_device(data.test_images, data.test_labels)

    def evaluated():
        model.load_state_dict(server, strict=False)
        return accuracy(model, *test)

    clock = workloads.Clock()
    for round in range(1 + args.rounds):
        with clock:
            total = {name: torch.zeros_like(x) for name, x in server.items()}
            for client in workloads.cohort(work, round):
                model.load_state_dict(server, strict=False)
                train(model, images[client], labels[client], work)
                for name, x in moving(model).items():
                    total[name].add_(x, alpha=1 / work.cohort)
            server = total
            if args.device == "cuda":
                torch.cuda.synchronize()
        clock.evaluate(work, evaluated)
    workloads.report(torch.__version__, clock, accuracy=evaluated())


if __name__ == "__main__":
    main()
