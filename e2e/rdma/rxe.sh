# rxe.sh N: in the guest, makes N soft-RoCE devices rxe0, rxe1, ... each on a link of its own with address 10.99.i.1.
set -e
modprobe -a ib_uverbs rdma_rxe dummy
for i in $(seq 0 $((${1:-1} - 1))); do
    ip link add "dum$i" type dummy
    ip link set "dum$i" mtu 4200 up # room for the largest RDMA packet, 4096 bytes
    ip addr add "10.99.$i.1/24" dev "dum$i"
    rdma link add "rxe$i" type rxe netdev "dum$i"
done
