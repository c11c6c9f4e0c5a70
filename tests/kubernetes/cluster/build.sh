#!/usr/bin/env bash
# Kubernetes 1.20.2 (API server, scheduler, controller-manager, kubelet) from Debian's sources, and the programs that it needs from
# Debian's packages, all in one folder: nothing is installed. Newer sources are not packaged with what they are built from.
#   build.sh FOLDER    makes FOLDER/bin and FOLDER/root; takes what is there, and goes on where it was stopped
# It says on the standard output what it does, a line for each step; what the programs say goes to the standard error.
set -euo pipefail
exec 3>&1 1>&2
step() { echo "$*" >&3; }
mkdir -p "$1/bin" "$1/debs" "$1/root" "$1/work/lists/partial" "$1/work/archives/partial"
folder=$(cd "$1" && pwd)
bin=$folder/bin debs=$folder/debs work=$folder/work root=$folder/root tools=$folder/work/tools
programs="kubelet kube-scheduler kube-controller-manager kube-apiserver"
mirror=${MIDSTEP_DEBIAN_MIRROR:-http://deb.debian.org/debian}

needed="containerd runc containernetworking-plugins etcd-server kubernetes-client busybox-static"
compiler="golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev"

absent=
for package in $needed $compiler; do compgen -G "$debs/${package}_*.deb" > /dev/null || absent="$absent $package"; done
if [ -n "$absent" ] || ! compgen -G "$debs/kubernetes_*.orig.tar.gz" > /dev/null; then
  step "downloading sources and packages from $mirror"
  cat > "$work/debian.sources" << END
Types: deb deb-src
URIs: $mirror
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
  apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/debian.sources" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists"
    -o "Dir::Cache=$work" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User= -o Acquire::Retries=3)
  "${apt[@]}" update
  cd "$debs"
  "${apt[@]}" source --download-only kubernetes
  # shellcheck disable=SC2086
  [ -z "$absent" ] || "${apt[@]}" download $absent
fi
for package in $needed; do dpkg -x "$debs/$package"_*.deb "$root"; done

missing=
for program in $programs; do [ -x "$bin/$program" ] || missing="$missing $program"; done
[ -n "$missing" ] || exit 0

for package in $compiler; do dpkg -x "$debs/$package"_*.deb "$tools"; done
export GOROOT=$tools/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/gocache GO111MODULE=off GOPROXY=off CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH
sources=$GOPATH/src/k8s.io/kubernetes
if [ ! -e "$sources/.unpacked" ]; then
  step "unpacking the sources"
  rm -rf "$sources" && mkdir -p "$sources"
  tar -xzf "$debs"/kubernetes_1.20.*.orig.tar.gz -C "$sources" --strip-components 1
  # The vendored one does not compile with this Go.
  reflect2=vendor/github.com/modern-go/reflect2
  rm -rf "${sources:?}/$reflect2"
  cp -r "$tools/usr/share/gocode/src/github.com/modern-go/reflect2" "$sources/$reflect2"
  rm -f "$sources/$reflect2/go.mod"
  touch "$sources/.unpacked"
fi
cd "$sources"

# The API's description of itself is generated, and not part of the sources.
openapi=pkg/generated/openapi/zz_generated.openapi.go
if [ ! -e "$openapi" ]; then
  step "generating the description of the API"
  go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  described=$(grep -rl --include '*.go' --exclude '*_test.go' '+k8s:openapi-gen=' pkg staging/src vendor/k8s.io |
    xargs -n 1 dirname | sed 's#^staging/src/#vendor/#; s#^#k8s.io/kubernetes/#' | sort -u | paste -sd ,)
  "$work/openapi-gen" --logtostderr --go-header-file hack/boilerplate/boilerplate.generatego.txt --output-file-base zz_generated.openapi \
    --output-package k8s.io/kubernetes/pkg/generated/openapi --input-dirs "$described" --report-filename /dev/null
fi

version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
for program in $missing; do
  step "building $program"
  go build -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" -o "$work/$program" "./cmd/$program"
  mv "$work/$program" "$bin/$program"
done
rm -rf "$work"
