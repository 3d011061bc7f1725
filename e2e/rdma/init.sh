#!/bin/busybox sh
# The first process of the guest, in its initramfs: takes over the host's root file system and runs the command.
#
# Given on the kernel's command line: guest.share, the folder of the host that is written through; guest.modules, where the
# kernel's modules lie on the host. In the share: `command`, a script of bash; its exit status is left in `status`.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in /modules/*.ko; do $b insmod "$module"; done

given() { $b sed -n "s/.*guest\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
share=$(given share)
modules=$(given modules)
plan9=trans=virtio,version=9p2000.L,msize=1048576

# The host's root is only read; what is written stays in this machine's memory, but for the share.
$b mount -t 9p -o "$plan9,cache=loose,ro" root /lower || $b poweroff -f
$b mount -t tmpfs tmpfs /written
$b mkdir /written/upper /written/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/written/upper,workdir=/written/work overlay /root || $b poweroff -f
$b mkdir -p "/root$share" /root/lib/modules /root/run /root/var/tmp
$b mount -t 9p -o "$plan9,cache=none" share "/root$share"
$b mount --bind "/root$modules" /root/lib/modules
for folder in proc sys dev; do $b mount --move /$folder /root/$folder; done
$b mkdir -p /root/dev/shm /root/dev/pts
$b mount -t devpts devpts /root/dev/pts
for folder in dev/shm run var/tmp; do $b mount -t tmpfs -o mode=1777 tmpfs /root/$folder; done
$b ifconfig lo 127.0.0.1 up

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
$b cat >/root/run/guest <<X
ulimit -l unlimited
/bin/bash "$share/command" </dev/null >/dev/ttyS1 2>&1
echo \$? >"$share/status"
sync
echo o >/proc/sysrq-trigger
sleep 5
X
exec $b switch_root /root /bin/bash /run/guest
