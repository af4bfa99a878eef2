//go:build unix && !linux

package embedded

import "syscall"

// endWithParent does nothing: only Linux can. The next Start on the folder
// stops the server instead.
func endWithParent(*syscall.SysProcAttr) {}
