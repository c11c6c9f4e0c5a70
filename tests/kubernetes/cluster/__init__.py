"""A real Kubernetes 1.20.2 on machines made of namespaces: API server, scheduler, controllers, and a kubelet on
each node.

Machine m0 has the control plane; m1 and on are the nodes, each with containerd and eight `huawei.com/Ascend910`,
which are numbers only. Root and version 1 cgroups are needed, and nothing is left when it is down.

By hand, in the repository (one cluster at a time on a computer; `up` waits for the last one to be gone):

    python -m tests.kubernetes.cluster build                  # once; 5 to 20 minutes; in ~/.cache/midstep-kubernetes
    python -m tests.kubernetes.cluster up 4 [--share FOLDER]  # m0 and nodes m1..m4 in 20 s; says `up:`, and holds it
    python -m tests.kubernetes.cluster run m0 -- kubectl get pods -o wide
    python -m tests.kubernetes.cluster run m0 -- .venv/bin/midstep run ...    # in the folder in which it is typed
    python -m tests.kubernetes.cluster off m3                 # a machine loses its power; also: on, cut, heal
    python -m tests.kubernetes.cluster down

`up` stays in the foreground: type the others in another terminal, or start it with `&`. Ctrl-C is `down`. `run`
sets KUBECONFIG (/tmp/midstep-kubernetes/kubeconfig, which works on the machines only) and has kubectl on its PATH.
Machines share the repository, the folders of `--share`, and /tmp/midstep-kubernetes, where the logs are.

In Python: `with Cluster(nodes=3, shared=[tmp_path]) as cluster: cluster.kubectl("get", "nodes")`; in a test of
tests/kubernetes/ the fixture `cluster`.

What is particular to it:

- There is one image, `midstep.test/host:1` (`image.IMAGE`), and no registry. A container of it sees this computer's
  programs (/usr, /bin, /lib), its Python and the repository, read-only; so the words that start midstep here
  (`sys.executable`, `-m midstep.cli.main`) start it in a container, too. Anything else, as a folder for
  checkpoints, is a hostPath volume of a folder that the machines share.
- Pods have addresses of the machines' own network, and reach the API at the address in their environment, with the
  certificate of their service account. There is no kube-proxy: the other Services' own addresses lead nowhere,
  their names lead to their pods. Names are answered by a program of these tests, as CoreDNS does, from the API's
  endpoints (`names`).
- A node is NotReady 6 s after its last word, and pods tolerate that for 2 s instead of 300.
- All of Kubernetes is that of 1.20.2: no Indexed completion, podFailurePolicy, restartPolicyRules; disruption
  budgets are policy/v1beta1."""
