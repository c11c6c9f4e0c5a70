#!/bin/bash
# A node on a machine: containerd, and a kubelet in the foreground. Runs on the machine, in a cgroup namespace of its own; all that it
# writes is in memory that goes with the machine.
#   node.sh NUMBER ADDRESS STATE NETWORK_PLUGINS HIERARCHY...
set -eu
number=$1 address=$2 state=$3 plugins=$4
shift 4
name=m$number

mount -n -t tmpfs cgroups /sys/fs/cgroup
for hierarchy in "$@"; do
  mkdir "/sys/fs/cgroup/${hierarchy#name=}"
  case $hierarchy in name=*) options=none,$hierarchy ;; *) options=$hierarchy ;; esac
  mount -n -t cgroup -o "$options" cgroup "/sys/fs/cgroup/${hierarchy#name=}"
done

# Pods are logged in /var/log/pods, and device plugins found in /var/lib/kubelet, wherever a kubelet is told to be.
mkdir -p /run/var/upper /run/var/work
mount -n -t overlay -o lowerdir=/var,upperdir=/run/var/upper,workdir=/run/var/work var /var

# A kubelet sets these for the whole kernel. It finds them set, and leaves those of this computer as they are.
settings="vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000
  kernel/keys/root_maxbytes=25000000"
mkdir /run/settings
for setting in $settings; do
  file=/run/settings/$(basename "${setting%=*}")
  echo "${setting#*=}" > "$file"
  mount -n --bind "$file" "/proc/sys/${setting%=*}"
done

# Pods are on the machines' network: the bridge between them takes over the machine's cable, with its address.
ip link add cni0 address "$(printf '02:00:00:00:00:%02x' "$number")" type bridge
ip addr flush dev eth0
ip link set eth0 master cni0
ip link set cni0 up
ip addr add "$address/16" dev cni0

mkdir -p /run/containerd /run/network /run/kubelet
cat > /run/network/pods.conflist << END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0", "ipam": {"type": "host-local",
  "dataDir": "/run/network/given", "ranges": [[{"subnet": "198.18.0.0/16", "rangeStart": "198.18.$((100 + number)).2",
  "rangeEnd": "198.18.$((100 + number)).250"}]]}}]}
END
cat > /run/containerd/config.toml << END
version = 2
root = "/run/containerd/root"
state = "/run/containerd/state"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$IMAGE"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$plugins"
    conf_dir = "/run/network"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "$state/specification.json"
END
cat > /run/kubelet/config.yaml << END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
nodeLeaseDurationSeconds: 8
nodeStatusUpdateFrequency: 2s
syncFrequency: 10s
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
imageGCHighThresholdPercent: 100
oomScoreAdj: 0
resolvConf: ""
clusterDomain: cluster.local
clusterDNS: ["$NAMES"]
volumePluginDir: /run/kubelet/plugins
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
END

containerd --config /run/containerd/config.toml > "$state/logs/containerd-$name.log" 2>&1 &
export CONTAINERD_ADDRESS=/run/containerd/containerd.sock CONTAINERD_NAMESPACE=k8s.io
tries=0
until ctr version > /dev/null 2>&1; do
  tries=$((tries + 1))
  [ $tries -lt 300 ] || { echo "containerd does not answer" >&2; exit 1; }
  sleep 0.1
done
ctr images import "$state/image.tar"

exec kubelet --config=/run/kubelet/config.yaml --kubeconfig="$state/kubeconfig" --hostname-override="$name" --node-ip="$address" \
  --container-runtime=remote --container-runtime-endpoint=unix:///run/containerd/containerd.sock --eviction-hard= \
  --root-dir=/run/kubelet/root --cert-dir=/run/kubelet/keys --v=1
