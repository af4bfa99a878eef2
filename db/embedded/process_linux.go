package embedded

import "syscall"

// endWithParent asks the kernel to stop the process when the thread that
// starts it ends. The syscall package does so after the change of user, which
// would undo it.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGINT }
